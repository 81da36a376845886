"""The steps of the main job, one per file."""
