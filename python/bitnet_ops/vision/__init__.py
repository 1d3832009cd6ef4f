"""Images: pixels of a file, patches, the tower that turns them into rows of the text model."""
