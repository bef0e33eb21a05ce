"""Stateless calls, judge style: languages, verdicts and checkers (pure), the engine that runs them in lanes."""
