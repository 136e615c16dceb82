"""For whoever operates a federation: provision, members, app, bundle."""
