"""Barriers and the commit of one checkpoint of one job, over all its nodes."""
