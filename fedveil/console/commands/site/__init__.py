"""At a site: start, explain, doctor, privacy."""
