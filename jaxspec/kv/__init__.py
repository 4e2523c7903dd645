"""The paged key/value pool and the formats it is stored in."""
