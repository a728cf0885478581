"""The users' tool: command line, evaluation, figures, benchmarks, sweeps."""
