"""Files in a well's home that tell the next well what this one knows."""
