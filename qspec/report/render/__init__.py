"""Documents as HTML, Markdown, text, CSV and pictures."""
