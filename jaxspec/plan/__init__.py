"""Arithmetic on what a model needs, before there is a machine to run it on: memory."""
