"""What a step sends and holds, foretold without running it; which settings fit."""
