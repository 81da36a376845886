"""Files that users write and read: recipe, manifest, results. Unknown fields are refused."""
