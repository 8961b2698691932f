"""One module for each public function."""
