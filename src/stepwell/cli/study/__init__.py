"""Commands that run no well: replays of traces, and measurements of policies on models."""
