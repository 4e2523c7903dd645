"""One module a command, and what commands share. jax is imported by none of them before there is work for it."""
