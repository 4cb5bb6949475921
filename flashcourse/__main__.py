from flashcourse.cli import app

app(prog_name="python -m flashcourse")
