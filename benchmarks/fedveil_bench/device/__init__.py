"""What a training takes of the device that it runs on."""
