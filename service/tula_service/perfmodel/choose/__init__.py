"""From predictions to a recommendation: prices, frontier, knee, limits."""
