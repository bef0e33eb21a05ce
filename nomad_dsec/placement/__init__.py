"""Feasible, rank, decision with reasons. Pure."""
