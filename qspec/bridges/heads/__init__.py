"""Draft heads on disk: MLP speculators, and EAGLE-3 heads in both of their formats."""
