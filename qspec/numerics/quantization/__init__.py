"""Formats, scales, codes and what makes their error small."""
