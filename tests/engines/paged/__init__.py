"""Tests of copying between pages and slots: no engine is needed."""
