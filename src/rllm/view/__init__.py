"""The local page over runs: what a person sees of stores and metrics, live and afterwards."""
