"""Speed, acceptance, accuracy and proof of a pair."""
