"""What a plan is and means: records, text, digest, slices, proof and simulation."""
