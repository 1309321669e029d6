"""The rules that every plan holds. The program has them as constraints; the runtime checks them when it loads a plan."""
