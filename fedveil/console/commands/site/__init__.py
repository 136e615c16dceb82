"""Commands for a site: site, explain, doctor, privacy, canaries, export."""
