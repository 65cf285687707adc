"""What attention on codes and retrieval cost in quality: measured against full attention over plain numbers."""
