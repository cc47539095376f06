"""What a job tells about itself (docs/telemetry.md): metrics under verl's names, traces, and what Prometheus asks for.

sinks.py         the interface of a sink; metrics.jsonl       trace.py         trace.json
tensorboard.py   TensorBoard files                            tracing.py       OpenTelemetry's spans of a step
wandb.py  mlflow.py      run by others, in background.py      otlp.py          their export
open_sinks.py    those that a job asks for                    job_metrics.py   metrics.prom
now.py  plans.py         now.json, plans.jsonl                config.py        [telemetry]
"""
