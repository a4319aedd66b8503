"""The agent in the idiom of training frameworks; each is imported only by the script that uses it."""
