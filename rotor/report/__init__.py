"""Plans as text, figures, pages and traces."""
