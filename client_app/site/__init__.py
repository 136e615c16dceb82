"""What a site is, permits and keeps."""
