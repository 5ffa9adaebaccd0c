"""Defines the SQL tables of people, of the roles that were granted to them, and of sign-ins that cannot be used again."""

from sqlalchemy import JSON, Float, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from graftwork.platform.database import Base


class PersonRow(Base):
    """A person, known by issuer and subject."""

    __tablename__ = "people"
    __table_args__ = (Index("ix_people_issuer_subject", "issuer", "subject", unique=True),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    issuer: Mapped[str] = mapped_column(String(500))
    subject: Mapped[str] = mapped_column(String(255))
    email: Mapped[str | None] = mapped_column(String(320), index=True)
    groups: Mapped[list[str]] = mapped_column(JSON)
    operator_role: Mapped[str | None] = mapped_column(String(32))
    operator_hash: Mapped[bytes | None] = mapped_column(LargeBinary)
    created_at: Mapped[float] = mapped_column(Float)
    signed_in_at: Mapped[float | None] = mapped_column(Float)
    suspended_at: Mapped[float | None] = mapped_column(Float)


class RoleGrantRow(Base):
    """A role that was granted to a person."""

    __tablename__ = "role_grants"

    person_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    role: Mapped[str] = mapped_column(String(32), primary_key=True)
    granted_on: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)
    """The tenant or organisation; empty for an operator's role."""
    granted_at: Mapped[float] = mapped_column(Float)


class SpentSignInRow(Base):
    """A sign-in that was used, by the digest of its state or token, until it would have ended by itself."""

    __tablename__ = "spent_sign_ins"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    ends_at: Mapped[float] = mapped_column(Float, index=True)
