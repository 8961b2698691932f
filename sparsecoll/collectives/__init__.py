"""Collectives of sparse vectors: one public function, one file, beside what these share."""
