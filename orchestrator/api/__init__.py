"""The job API over HTTP: submit, follow and steer training jobs; the same on one machine and on a cluster."""
