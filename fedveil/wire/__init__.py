"""The wire: codecs (one a file), the envelope around them, and the tap that records what the other side could see."""
