"""Keeps a copy of every file in the folder of the run."""

import shutil

from wrong_plugins.transports.base import Files


class Transport(Files):
    def load(self, generation, handles):
        super().load(generation, handles)
        shutil.copy(handles["file"], self.context.folder)
