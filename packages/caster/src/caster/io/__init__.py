"""Files in and out: images, feature files, prediction tables, the feature cache."""
