"""What a job tells about itself: metrics under verl's names (JSON lines, TensorBoard) and a trace for Perfetto.

sinks.py         the interface of a sink; metrics.jsonl
tensorboard.py   TensorBoard files
trace.py         trace.json
"""
