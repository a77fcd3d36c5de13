"""Doctor inside of an image: whether its contents are what a row of the matrix asks for."""
