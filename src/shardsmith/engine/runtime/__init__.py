"""What all axes stand on: process groups, the one linear, the pipeline interpreter, the recorder."""
