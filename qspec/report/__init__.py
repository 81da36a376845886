"""From results to documents: pages, text, tables, gates."""
