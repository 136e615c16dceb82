"""Backups of a site's state folder and of a federation's folder: written to one file, checked whole, put back."""
