"""Training of Medusa heads: `python -m train_medusa --help`. It imports jaxspec, which never imports it back."""
