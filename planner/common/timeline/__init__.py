"""What each stage did and waited for: as data, as a picture, as a file."""
