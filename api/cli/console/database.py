"""Opens the database for the commands that work on it without a server."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftwork.platform.database import Database


def open_database(data_dir: Path | None, database_url: str | None) -> "Database":
    """Returns the database that the options name, or else the settings. The caller closes it."""
    # Only these commands need SQLAlchemy and Alembic.
    from graftwork.platform.data_folder import prepare_data_folder
    from graftwork.platform.database import Database
    from graftwork.platform.settings.settings import Settings

    settings = Settings.from_environment({"data_dir": data_dir, "database_url": database_url})
    prepare_data_folder(settings.data_dir)
    return Database(settings.resolved_database_url)
