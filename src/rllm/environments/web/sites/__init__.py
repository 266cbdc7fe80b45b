"""Small websites of our own, with tasks that are judged by their books."""
