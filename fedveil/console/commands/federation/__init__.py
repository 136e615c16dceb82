"""Commands for the operator of a federation: provision, members, app, bundle."""
