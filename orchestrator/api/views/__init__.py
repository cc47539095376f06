"""What a page that looks on asks for: a run's files, cut to a window and thinned out to what can be seen.

tail.py       lines that were appended since the last look      timeline.py   replicas over time, as lanes or as counts
trace.py      trace.json as columns                             costs.py      cost.json, a column per function
texts.py      samples of a step, filtered, sorted, paged        thin.py       columns of many steps as few points
log.py        events by kind, and the orchestrator's last lines
"""
