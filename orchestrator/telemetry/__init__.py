"""What a job tells about itself (docs/telemetry.md): metrics under verl's names, traces, and what Prometheus asks for.

sinks.py         the interface of a sink; metrics.jsonl       trace.py         trace.json
tensorboard.py   TensorBoard files                            otlp.py          OpenTelemetry's export
wandb.py  mlflow.py      run by others, in background.py      job_metrics.py   metrics.prom
open_sinks.py    those that a job asks for                    now.py  plans.py now.json, plans.jsonl
"""
