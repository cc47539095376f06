"""Where replicas of functions run: local processes, Knative, or virtual time, behind one interface."""
