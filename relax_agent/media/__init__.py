"""Media: finding, checking and decoding images, sounds and videos."""
