"""Requests of engines: recalls, spills, the decision whether a recall is worth it, and clearing."""
