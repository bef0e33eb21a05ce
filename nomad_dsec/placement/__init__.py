"""Feasible, rank, decision with reasons. Pure: no clock, no sockets, randomness is passed in."""
