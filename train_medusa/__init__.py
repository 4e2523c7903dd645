"""Training of Medusa heads: imports jaxspec, which never imports it back. The job comes with the Medusa work."""
