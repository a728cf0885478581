"""How far the engines are from measured systems and from theory."""
